"""`aserve route`: an HTTP proxy that balances requests over servers with OpenAI's API.

The Balancer, its policies and the index of prefixes decide, and do no I/O. The proxy sends, retries
before the first byte, and tells the Balancer what happened.
"""
