job "x" {
  meta = { a = 1, a = 2, "b" = 1, b = 2 }
  meta { b = 1 }
  group "g" {
    task "t" {
      driver = "exec"
      env {
        "A" = "1"
        "A" = "2"
      }
      resources = {}
      resources { cpu = 1 }
      config {}
      config {}
    }
  }
}
