# The reason why it fails has the command in it.
job "<b onmouseover=alert(2)>" {
  type = "batch"

  group "<script>" {
    task "main" {
      driver = "exec"

      config {
        command = "/<script>alert(3)<\u002fscript>\u001b[31m\u202e"
      }

      restart {
        attempts = 0
        mode     = "fail"
      }
    }
  }
}
