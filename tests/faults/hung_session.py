"""A session that never ends, deaf to polite signals, with a child of its own that never ends either."""

import signal
import subprocess
import sys
import time

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # decode-gap hung child"])
    time.sleep(600)
