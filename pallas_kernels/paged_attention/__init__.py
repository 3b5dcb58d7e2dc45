"""Attention of decode and verification rows over paged KV."""

