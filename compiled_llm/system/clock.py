"""The moment from which a program counts what its start took: the import of the package; other imports count."""

import time

PACKAGE_IMPORTED = time.perf_counter()
