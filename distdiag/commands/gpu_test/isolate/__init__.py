"""gpu-test --isolate: which rank, node or link is at fault, from the bandwidth of every two ranks."""
