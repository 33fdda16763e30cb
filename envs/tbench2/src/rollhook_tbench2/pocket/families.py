"""The thirteen families of pocket tasks: what is asked, the right command, wrong ones, and the proof.

A family draws an argument combination and makes work of it. Names appear in the command in the very
form that they have in the instruction (same path, same extension), so that a policy has to copy them.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollhook_tbench2.pocket.stream import Stream

# fmt: off
#: no word is part of another
WORDS = (
    "amber", "anchor", "basil", "beacon", "birch", "bridge", "candle", "canyon",
    "cedar", "cobalt", "comet", "copper", "coral", "cotton", "delta", "ember",
    "falcon", "fern", "forest", "garnet", "ginger", "glacier", "harbor", "hazel",
    "heron", "indigo", "island", "ivory", "jasper", "juniper", "lagoon", "lantern",
    "lemon", "linen", "maple", "marble", "meadow", "mosaic", "nectar", "olive",
    "onyx", "orchid", "pebble", "pepper", "quartz", "raven", "saffron", "willow",
)
# fmt: on
#: file name extensions
EXTENSIONS = ("txt", "log", "cfg")

Args = tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """One concrete piece of work in the directory /work.

    `wrong` are plausible commands that must fail the check; the first is the one that noisy
    demonstrations show, and `shown` is the exit code and output that it has. `check` holds shell
    conditions, all of which must be true; `holds FILE TEXT` is there for them.
    """

    phrasings: tuple[str, str]
    command: str
    wrong: tuple[str, ...]
    check: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    shown: tuple[int, str] = (0, "")


@dataclass(frozen=True)
class Family:
    """A kind of task. Families with one `group` share the train/held-out split of their combinations.

    They must where a wrong command of one is the right command of the other (`cp` for `mv`).
    """

    name: str
    group: str
    noisy: bool
    draw: Callable[[Stream], Args]
    work: Callable[[Args, Stream], Work]


def _lines(rows: list[str]) -> bytes:
    return "".join(f"{row}\n" for row in rows).encode()


def _text(data: bytes) -> str:
    return data.decode().removesuffix("\n")


def _holds(path: str, data: bytes | str) -> str:
    return f"holds {path} '{data if isinstance(data, str) else _text(data)}'"


def _prose(stream: Stream, lines: int, avoid: str = "") -> list[str]:
    """Return lines of two words each, none of them `avoid`."""
    words = [word for word in WORDS if word != avoid]
    return [" ".join(stream.sample(words, 2)) for _ in range(lines)]


def _word_and_file(stream: Stream) -> Args:
    word, name = stream.sample(WORDS, 2)
    return word, f"{name}.{stream.pick(EXTENSIONS)}"


def _two_files(stream: Stream) -> Args:
    extension = stream.pick(EXTENSIONS)
    return tuple(f"{name}.{extension}" for name in stream.sample(WORDS, 2))


def _create(args: Args, stream: Stream) -> Work:
    word, file = args
    return Work(
        (f"Create the file {file} with the text {word}.", f"Put the word {word} in a new file {file}."),
        f"echo {word} > {file}",
        (f"echo {word}", f"touch {file}", f"mkdir {file}"),
        (_holds(file, word),),
        shown=(0, word),
    )


def _append(args: Args, stream: Stream) -> Work:
    word, file = args
    old = _lines(_prose(stream, 2))
    return Work(
        (f"Append the line {word} to {file}.", f"Add {word} at the end of the file {file}."),
        f"echo {word} >> {file}",
        (f"echo {word} > {file}", f"echo {word}"),
        (_holds(file, old + word.encode()),),
        {file: old},
    )


def _copy(args: Args, stream: Stream) -> Work:
    source, target = args
    data = _lines(_prose(stream, 2))
    return Work(
        (f"Copy {source} to {target}.", f"Make a copy of the file {source} named {target}."),
        f"cp {source} {target}",
        (f"mv {source} {target}", f"ln -s {source} {target}", f"touch {target}"),
        (_holds(source, data), _holds(target, data)),
        {source: data},
    )


def _rename(args: Args, stream: Stream) -> Work:
    source, target = args
    data = _lines(_prose(stream, 2))
    return Work(
        (f"Rename {source} to {target}.", f"Change the name of the file {source} to {target}."),
        f"mv {source} {target}",
        (f"cp {source} {target}", f"rm {source}"),
        (f"[ ! -e {source} ]", _holds(target, data)),
        {source: data},
    )


def _directory_and_file(stream: Stream) -> Args:
    directory, name = stream.sample(WORDS, 2)
    return (f"{directory}/{name}.{stream.pick(EXTENSIONS)}",)


def _delete(args: Args, stream: Stream) -> Work:
    (path,) = args
    directory, file = path.split("/")
    other = stream.pick([word for word in WORDS if word != file.split(".")[0]])
    kept = f"{directory}/{other}.txt"
    data = _lines(_prose(stream, 1))
    return Work(
        (f"Delete the file {path}.", f"Remove {path} and nothing else."),
        f"rm {path}",
        (f"rm -r {directory}", f"rm {kept}", f"rm {file}"),
        (f"[ ! -e {path} ]", _holds(kept, data)),
        {path: _lines(_prose(stream, 1)), kept: data},
    )


def _path_and_output(stream: Stream) -> Args:
    directory, name, output = stream.sample(WORDS, 3)
    return f"{directory}/{name}.txt", f"{output}.txt"


def _count(args: Args, stream: Stream) -> Work:
    path, output = args
    lines = 3 + stream.below(7)
    data = _lines(_prose(stream, lines))
    return Work(
        (f"Write the number of lines of {path} to {output}.", f"Count the lines in {path} into {output}."),
        f"wc -l < {path} > {output}",
        (f"wc -l {path} > {output}", f"wc -w < {path} > {output}", f"wc -l < {path}"),
        (_holds(output, str(lines)), _holds(path, data)),
        {path: data},
    )


def _word_and_two_files(stream: Stream) -> Args:
    word, name, output = stream.sample(WORDS, 3)
    return word, f"{name}.{stream.pick(EXTENSIONS)}", f"{output}.txt"


def _grep(args: Args, stream: Stream) -> Work:
    word, file, output = args
    rows = _prose(stream, 5, avoid=word)
    for place in stream.sample(range(5), 2):
        rows[place] = f"{rows[place].split()[0]} {word}"
    data, found = _lines(rows), "\n".join(row for row in rows if word in row)
    return Work(
        (
            f"Write the lines of {file} with the word {word} to {output}.",
            f"Find {word} in {file} and save the lines in {output}.",
        ),
        f"grep {word} {file} > {output}",
        (f"grep {word} {file}", f"grep -v {word} {file} > {output}", f"grep -c {word} {file} > {output}"),
        (_holds(output, found), _holds(file, data)),
        {file: data},
        (0, found),
    )


def _sort(args: Args, stream: Stream) -> Work:
    path, output = args
    words = stream.sample(WORDS, 4)
    if words == sorted(words):
        words.reverse()
    data = _lines([*words, words[0], words[1]])
    return Work(
        (
            f"Sort the lines of {path} without duplicates into {output}.",
            f"Write each line of {path} once, sorted, to {output}.",
        ),
        f"sort -u {path} > {output}",
        (f"sort {path} > {output}", f"uniq {path} > {output}", f"sort -u {path}", f"cp {path} {output}"),
        (_holds(output, "\n".join(sorted(words))), _holds(path, data)),
        {path: data},
    )


def _two_levels(stream: Stream) -> Args:
    return ("/".join(stream.sample(WORDS, 2)),)


def _mkdir(args: Args, stream: Stream) -> Work:
    (path,) = args
    outer, inner = path.split("/")
    return Work(
        (f"Make the directory {path}.", f"Create the directories {path}."),
        f"mkdir -p {path}",
        (f"mkdir {path}", f"mkdir {outer}", f"mkdir {outer} {inner}", f"touch {path}"),
        (f"[ -d {path} ]", f"[ ! -L {path} ]"),
        {},
        (1, f"mkdir: cannot create directory '{path}': No such file or directory"),
    )


def _script(stream: Stream) -> Args:
    directory, name = stream.sample(WORDS, 2)
    return (f"{directory}/{name}.sh",)


def _chmod(args: Args, stream: Stream) -> Work:
    (path,) = args
    data = _lines(["#!/bin/sh", f"echo {stream.pick(WORDS)}"])
    return Work(
        (f"Make {path} executable.", f"Let the script {path} be run."),
        f"chmod +x {path}",
        (f"chmod -x {path}", f"chmod 644 {path}", f"sh {path}"),
        (_holds(path, data), f"[ -x {path} ]"),
        {path: data},
    )


def _archive_and_directory(stream: Stream) -> Args:
    name, directory = stream.sample(WORDS, 2)
    return f"{name}.tar", directory


def _contents(stream: Stream) -> dict[str, bytes]:
    return {f"{name}.txt": _lines(_prose(stream, 1)) for name in stream.sample(WORDS, 2)}


def _tarc(args: Args, stream: Stream) -> Work:
    archive, directory = args
    files = _contents(stream)
    first = next(iter(files))
    return Work(
        (f"Pack the directory {directory} into {archive}.", f"Archive {directory} as {archive}."),
        f"tar -cf {archive} {directory}",
        (f"cp -r {directory} {archive}", f"tar -cf {archive} {directory}/{first}", f"touch {archive}"),
        (
            f"[ -f {archive} ]",
            "out=$(mktemp -d)",
            f'tar -xf {archive} -C "$out"',
            f'[ "$(ls -A "$out")" = {directory} ]',
            *(_holds(f'"$out"/{directory}/{name}', data) for name, data in files.items()),
        ),
        {f"{directory}/{name}": data for name, data in files.items()},
    )


def _tar(files: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def _tarx(args: Args, stream: Stream) -> Work:
    archive, directory = args
    files = _contents(stream)
    kept = _lines(_prose(stream, 1))
    return Work(
        (f"Extract {archive} into the directory {directory}.", f"Unpack {archive} in {directory}."),
        f"tar -xf {archive} -C {directory}",
        (f"tar -xf {archive}", f"tar -tf {archive} -C {directory}", f"cp {archive} {directory}"),
        (
            *(_holds(f"{directory}/{name}", data) for name, data in files.items()),
            _holds(f"{directory}/readme.md", kept),
        ),
        {archive: _tar(files), f"{directory}/readme.md": kept},
    )


def _table_and_output(stream: Stream) -> Args:
    name, output = stream.sample(WORDS, 2)
    return stream.pick(("2", "3")), f"{name}.csv", f"{output}.txt"


def _csv(args: Args, stream: Stream) -> Work:
    column, file, output = args
    rows = [
        [word, str(10 + stream.below(40)), str(60 + stream.below(40))] for word in stream.sample(WORDS, 4)
    ]
    data = _lines([",".join(row) for row in rows])
    wanted = "\n".join(row[int(column) - 1] for row in rows)
    other = "3" if column == "2" else "2"
    return Work(
        (f"Write column {column} of {file} to {output}.", f"Save column {column} from {file} in {output}."),
        f"cut -d, -f{column} {file} > {output}",
        (
            f"cut -f{column} {file} > {output}",
            f"cut -d, -f{other} {file} > {output}",
            f"cut -d, -f{column} {file}",
            f"cut -d, -f1 {file} > {output}",
        ),
        (_holds(output, wanted), _holds(file, data)),
        {file: data},
    )


FAMILIES = (
    Family("create", "word-file", False, _word_and_file, _create),
    Family("append", "word-file", True, _word_and_file, _append),
    Family("copy", "two-files", False, _two_files, _copy),
    Family("rename", "two-files", True, _two_files, _rename),
    Family("delete", "delete", False, _directory_and_file, _delete),
    Family("count", "count", True, _path_and_output, _count),
    Family("grep", "grep", True, _word_and_two_files, _grep),
    Family("sort", "sort", True, _path_and_output, _sort),
    Family("mkdir", "mkdir", True, _two_levels, _mkdir),
    Family("chmod", "chmod", False, _script, _chmod),
    Family("tarc", "tarc", False, _archive_and_directory, _tarc),
    Family("tarx", "tarx", True, _archive_and_directory, _tarx),
    Family("csv", "csv", True, _table_and_output, _csv),
)
