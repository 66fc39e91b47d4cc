"""`python -m forebay`."""

import sys

from forebay.base.process import add_folder

if __name__ == "__main__":
    if not sys.flags.safe_path:
        add_folder(sys.path.pop(0))  # Python puts the working folder before its own library
    from forebay.cli import main

    main()
