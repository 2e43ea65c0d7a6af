job "x" {
  /* never closed
}
