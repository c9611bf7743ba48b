"""gpu-test --isolate: find the faulty rank, node or link from the bandwidth of every pair of ranks."""
