job "shape" {
  group "g" {
    volume "device" {
      type            = "csi"
      attachment_mode = "block-device"
      ephemeral "p" { plugin_id = "p" }
      mount_options { mount_group = 5 }
    }
    volume "names" {
      type = "csi"
      ephemeral {
        plugin  = "p"
        contxt  = {}
        volume_id = "v"
      }
    }
    volume "of-the-host" {
      type = "host"
      ephemeral { plugin_id = "p" }
    }
    volume "twice" {
      type = "csi"
      ephemeral { plugin_id = "p" }
      ephemeral { plugin_id = "q" }
    }
    volume "much" {
      type = "csi"
      ephemeral {
        plugin_id = "p"
        context {
          a = "${join("", range(1000))}${join("", range(1000))}"
        }
      }
    }
    task "t" { driver = "exec" }
  }
}
