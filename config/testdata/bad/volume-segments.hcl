id        = "v"
plugin_id = "p"
capability {
  access_mode     = "single-node-reader"
  attachment_mode = "file-system"
}
topology_request {
  required {
    topology {
      segments { zone = "a" }
      segments {
        zone = "b"
        zone = "c"
      }
    }
    topology {}
  }
}
