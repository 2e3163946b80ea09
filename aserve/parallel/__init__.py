"""The processes of an engine of several ranks, and the executor that sends them its steps."""
