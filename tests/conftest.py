"""What holds for all tests, whoever starts them."""

import signal

# A shell's background job and nohup have these ignored, and so would all that the tests start and then signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
