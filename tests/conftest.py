import os

# One thread: the tests are small, and two test processes that share cores slow each other ten-fold otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")
