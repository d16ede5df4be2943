"""Fine-tuning a BERT on labelled text: what to fetch, how to read it, batches, evaluation and the comparison."""
