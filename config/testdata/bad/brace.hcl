job "x" {
  group "g" {
    task "t" {
      driver = "exec"
      config {
        command = "true"
    }
  }
}
