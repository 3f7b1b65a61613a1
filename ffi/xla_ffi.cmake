# Where the headers of XLA's FFI are: in jaxlib.
if(NOT DEFINED XLA_FFI_INCLUDE_DIR)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util as u, os; print(os.path.join(os.path.dirname(u.find_spec('jaxlib').origin), 'include'))"
    OUTPUT_VARIABLE XLA_FFI_INCLUDE_DIR
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()
