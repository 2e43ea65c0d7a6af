variable "x" {}

job "x" {
  dynamic "group" {
    for_each = var.x
    labels   = [group.value]
    content {}
  }
}
