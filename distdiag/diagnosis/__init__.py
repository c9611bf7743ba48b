"""Judgement that commands share: pure, from facts to findings."""
