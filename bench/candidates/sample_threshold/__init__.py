"""The lower bound on logits that min_p, top_k and top_p leave, without a sort."""

from bench.candidates.sample_threshold.api import sample_threshold as sample_threshold
