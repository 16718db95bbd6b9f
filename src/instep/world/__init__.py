"""instep.world"""
