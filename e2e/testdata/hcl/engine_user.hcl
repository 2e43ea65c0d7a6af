# A container that runs SCRIPT with the volume VOLUME at /data, by driver DRIVER.

job "NAME" {
  group "g" {
    volume "v" {
      type            = "csi"
      source          = "VOLUME"
      access_mode     = "single-node-multi-writer"
      attachment_mode = "file-system"
    }

    task "use" {
      driver = "DRIVER"

      config {
        image        = "loopfs:latest"
        command      = "sh"
        args         = ["-c", "trap 'exit 0' TERM; SCRIPT"]
        network_mode = "none"
      }

      volume_mount {
        volume      = "v"
        destination = "/data"
      }

      restart {
        attempts = 20
        interval = "1h"
        delay    = "100ms"
        mode     = "fail"
      }
    }
  }
}
