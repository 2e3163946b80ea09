"""Collectives between ranks, and the weights of one rank."""
