job "x" {
  a = 1 1
  b = *
  c = 2 2
  d = 3 3
  e = 4 4
  f
}
