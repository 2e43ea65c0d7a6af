job "x" {
  group "g" {
    task "t" {
      driver = "exec"
      template {
        data = <<EOF
text
  EOT
      }
    }
  }
}
