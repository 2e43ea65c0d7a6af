job "crlf" {
  group "g" {
    task "t" {
      driver = "exec"
      env {
        "A" = "${node.unique.id}"
      }
      config {
        text = <<EOT
one
two ${NOMAD_ALLOC_ID}
EOT
      }
    }
  }
}
