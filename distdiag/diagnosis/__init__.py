"""Judgement that several commands share. Pure: facts in, findings or their parts out; nothing is read or printed."""
