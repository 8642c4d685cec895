"""Whatever bytes come in, the daemon answers or closes, keeps its books and lives: see CONTRIBUTING.md."""
