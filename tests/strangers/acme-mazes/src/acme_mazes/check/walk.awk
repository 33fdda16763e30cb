# Walks `way` through a maze: S is the start, G the goal, # a wall. Prints 1 if it ends at the goal, else 0.
{ for (x = 1; x <= length($0); x++) { cell[x, NR] = c = substr($0, x, 1); if (c == "S") { px = x; py = NR } } }
END {
  for (i = 1; i <= length(way); i++) {
    move = substr(way, i, 1)
    px += (move == "E") - (move == "W"); py += (move == "S") - (move == "N")
    if (cell[px, py] == "" || cell[px, py] == "#") { print 0; exit }
  }
  print (cell[px, py] == "G") + 0
}
