# A container whose image the engine pulls from a registry, by driver DRIVER.

job "pulled" {
  group "g" {
    task "t" {
      driver = "DRIVER"

      config {
        image        = "IMAGE"
        force_pull   = true
        command      = "sh"
        args         = ["-c", "trap 'exit 0' TERM; while :; do sleep 0.1; done"]
        network_mode = "none"

        auth {
          username = "puller"
          password = { file = "PASSWORD" }
        }
      }

      restart {
        attempts = 0
        mode     = "fail"
      }
    }
  }
}
