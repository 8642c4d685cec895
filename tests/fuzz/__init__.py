"""The daemon answers or closes on any bytes, keeps its books and lives: see CONTRIBUTING.md."""
