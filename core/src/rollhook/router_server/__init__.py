"""`rollhook router`: the router policies alone, as a proxy in front of engines."""
