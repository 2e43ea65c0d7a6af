variable "x" {}

id        = "v"
plugin_id = "p"

dynamic "capability" {
  for_each = var.x
  content {
    access_mode     = capability.value
    attachment_mode = "file-system"
  }
}
