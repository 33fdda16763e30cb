"""Behind `python3 core ...`: checks the Python version, then lets bootstrap.py do the work.

This file is kept readable by every Python 3, so that an old one gets a sentence and not a SyntaxError.
"""

import os
import shutil
import sys

OLDEST = (3, 11)


def too_old(version, executable, which=shutil.which):  # type: ignore[no-untyped-def]
    """Return what to say to a Python that is too old, or None for one that is not."""
    if tuple(version[:2]) >= OLDEST:
        return None
    text = "rollhook: needs Python {}.{} or newer; {} is {}.{}.".format(*OLDEST, executable, *version[:2])
    newer = [name for name in ("python3.13", "python3.12", "python3.11") if which(name)]
    if newer:
        return text + " This machine has {0}: run `{0} core ...`.".format(newer[0])
    return text + " Install one (for example `apt-get install python3.11 python3.11-venv`, or pyenv)."


if __name__ == "__main__":
    complaint = too_old(sys.version_info, sys.executable)
    if complaint:
        sys.stderr.write(complaint + "\n")
        sys.exit(2)
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import bootstrap

    sys.exit(bootstrap.main(sys.argv[1:]))
