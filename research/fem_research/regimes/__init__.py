"""Where the free energy helps: tasks that one average per head cannot do, and tasks that an average does best."""
