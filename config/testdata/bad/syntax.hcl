job "x" {
  a == 1
  b = = 2
  c = 1 1
  d = )
}
