job "../x" {
  group "a/b" {
    task "t" { driver = "exec" }
  }
}
