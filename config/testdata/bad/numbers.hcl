variable "big" { default = "1e999999999" }
job "x" {
  group "a" {
    count = -1
    task "t" { driver = "exec" }
  }
  group "b" {
    count = 9223372036854775808
    task "t" { driver = "exec" }
  }
  group "c" {
    count = 1.5
    task "t" { driver = "exec" }
  }
  group "d" {
    count = "many"
    task "t" { driver = "exec" }
  }
  group "e" {
    count = [1]
    task "t" {
      driver = "exec"
      config {
        n = var.big * 2
        m = "${"1e999999999" + 0}"
      }
    }
  }
}
