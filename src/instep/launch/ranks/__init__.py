"""The processes of one machine: the fork server, the ranks that it forks, and their end."""
