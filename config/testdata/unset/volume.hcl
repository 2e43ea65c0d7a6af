variable "x" {}

id          = "v"
plugin_id   = "p"
access_mode = var.x

capability {
  access_mode     = var.x
  attachment_mode = "file-system"
}

capability {
  access_mode     = var.x
  attachment_mode = "file-system"
}

secrets {
  file     = { file = var.x }
  callback = { callback = "a-${var.x}" }
  any      = { (var.x) = "a" }
}

mount_options {
  ownership = "recursive"
  owner     = var.x
}

topology_request {
  required {
    topology {
      segments {
        zone = var.x
      }
    }
  }
}
