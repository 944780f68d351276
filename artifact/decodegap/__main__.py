"""`python -m decodegap VERB`."""

import sys

from decodegap.cli import main

sys.exit(main())
