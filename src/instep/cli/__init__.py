"""instep.cli"""
