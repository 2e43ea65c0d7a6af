job "x" {
  type = "batch"
  type = "service"
  meta = { a = 1, a = 2 }
  meta { b = 1 }
}
