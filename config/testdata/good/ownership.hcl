job "owned" {
  group "g" {
    volume "data" {
      type            = "csi"
      source          = "data"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
      mount_options {
        owner = 1000
        group = "1001"
        mode  = "2770"
      }
    }
    volume "all" {
      type            = "csi"
      source          = "all"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
      mount_options {
        owner     = 0
        ownership = "recursive"
      }
    }
    task "t" { driver = "exec" }
  }
}
