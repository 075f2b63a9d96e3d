"""Root causes of a campaign's findings: grouped, known or new, each with a script and reproducible."""
