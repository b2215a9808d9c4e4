"""One token of decoding in one launch, with the state updated in place: running sums, or attention to slots."""
