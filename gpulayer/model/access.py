"""How long nodes believe a token without asking whoever holds the log: so long a revoked one may still read."""

APPROVED_SECONDS = 10.0
"""Where the log's holder answers: it is asked once in so long, and not with every request. What changes anything it
judges itself."""
APPROVED_SECONDS_ALONE = 600.0
"""Where it does not: nodes still say what they see (P10) to whom they have known just before. Long enough to look into
an outage; nothing can be changed meanwhile."""
