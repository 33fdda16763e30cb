"""A double of sandbox vendors: their wire protocols, served to the unmodified SDKs over loopback.

One program in its own process (`python -m doubles.vendors`), backed by bubblewrap. It is a double: it shows
that a client speaks the protocol and survives its faults, not what a vendor's cloud does.
"""
