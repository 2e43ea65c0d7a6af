job "x" {
  group "g" {
    task "t" {
      driver = "exec"
      a01 = 1
      a02 = 1
      a03 = 1
      a04 = 1
      a05 = 1
      a06 = 1
      a07 = 1
      a08 = 1
      a09 = 1
      a10 = 1
      a11 = 1
      a12 = 1
      a13 = 1
      a14 = 1
      a15 = 1
      a16 = 1
      a17 = 1
      a18 = 1
      a19 = 1
      a20 = 1
      a21 = 1
      a22 = 1
      a23 = 1
    }
  }
}
