"""BERT over several devices: data, tensor and pipeline parallelism, with and without the distributed optimizer."""
