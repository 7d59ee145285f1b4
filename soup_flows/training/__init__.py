"""The program that each rank runs, and what it needs: torch and transformers are imported only here."""
