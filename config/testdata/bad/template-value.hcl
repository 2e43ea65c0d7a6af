job "published" {
  group "g" {
    task "t" {
      driver = "exec"
      config {
        tags = ${tags}
      }
    }
  }
}
