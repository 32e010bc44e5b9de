"""What commands print: tables, descriptions, events and lines of logs."""
