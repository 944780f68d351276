"""A session that a device error ends: a traceback of many lines, the last of which says it."""

import sys

if __name__ == "__main__":
    sys.stdin.read()
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
