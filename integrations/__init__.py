"""Integrations with trainers and other libraries; each module is imported only when it is used."""
